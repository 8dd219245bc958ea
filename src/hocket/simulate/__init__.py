"""One event engine: compute, transfers with contention, memory."""
