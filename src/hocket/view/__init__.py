"""Views of results: text, one-file HTML reports and Perfetto traces."""
