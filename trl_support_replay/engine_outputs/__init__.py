"""From an engine's answer to supports and routes: readers without an engine of their own."""
