"""Attention kernels: tensors in, tensors out. Entry points: `dispatch.get_backend`, `scorers.get_scorer`, `layout`."""
