from ..server.conftest import engine, pool_of, server, weights_dir  # noqa: F401
