"""Mixture of experts: routing and experts. It knows nothing of requests or Ray."""
