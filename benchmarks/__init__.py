"""Each measures us and a peer in one run: ``python -m benchmarks NAME [--json FILE]``."""
