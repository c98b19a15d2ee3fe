"""Which weights the server samples from: versions, adapters, leases."""
