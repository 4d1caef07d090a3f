from gdn_ops import _native  # noqa: F401
