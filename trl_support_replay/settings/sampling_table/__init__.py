"""What each setting of the engines, of `generate` and of TRL does to the distribution that tokens are drawn from.

One module for each library. A field has one class (`Effect`), and the classes decide what is refused. A field that is
in no table is refused as unknown, so a new release of a library cannot bring in a setting that nobody has looked at;
a test compares the tables with the fields of the installed packages.
"""

from .effects import Effect, Field, Refused, unknown

__all__ = ["Effect", "Field", "Refused", "unknown"]
