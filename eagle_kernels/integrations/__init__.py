"""L4, adapters: the ops under the names, argument orders and conventions of other projects, none of which is imported.

`import eagle_kernels.integrations.sgl_kernel as sgl_kernel` stands in for SGLang's kernel package,
`import eagle_kernels.integrations.aiter as speculative` for AITER's speculative package.
"""
