"""The mathematics of training from preferences: pure functions of tensors.

In: tensors and plain numbers. Out: tensors and plain numbers. No configuration objects, no I/O,
no state besides the registries users extend. Legend: B samples, T response tokens, S sequence
tokens, V vocabulary.
"""
