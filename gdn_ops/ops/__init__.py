"""Python front of every op: a thin wrapper with the documentation, and the fake for tracing.

One module a family, named like the kernel file (``csrc/cpu/kernels/<family>.h``) and the test
(``tests/test_<family>.py``).
"""
