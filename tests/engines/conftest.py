from ..server.conftest import pool_of  # noqa: F401
from ..trainers.conftest import build  # noqa: F401
