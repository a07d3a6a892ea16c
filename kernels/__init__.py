"""Tensor operations: one name each, chosen by the tensors' device. They know nothing of models, requests or Ray."""
