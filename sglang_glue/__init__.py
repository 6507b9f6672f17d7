"""The verify kernels inside a running SGLang server: plug-in, settings, eligibility, validation, capture, metrics.

Importing this package imports neither torch nor SGLang; `sglang_glue.backend` is the file that knows SGLang's types.
"""
