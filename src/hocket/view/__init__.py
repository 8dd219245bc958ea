"""Results as text, as a one-file HTML report and as a Perfetto trace."""
