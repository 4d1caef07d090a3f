"""The functions that serving engines call, under their names and keywords.

:mod:`gdn_ops.compat.vllm` for vLLM's device-independent names, :mod:`gdn_ops.compat.vllm_cpu` for
those of its CPU engine, :mod:`gdn_ops.compat.vllm_kunlun` for the Kunlun plug-in,
:mod:`gdn_ops.compat.sglang` for sglang's, and :mod:`gdn_ops.compat.plugin`, which puts them in
place. None of them imports an engine before it is asked to.
"""
