"""How much of the experts' all-to-all two micro-batches hide, on one machine, over links of known delay and rate.

    PYTHONPATH=benchmarks .venv/bin/python -m overlap

docs/benchmarks.md, "Overlap", says how it is measured.
"""
