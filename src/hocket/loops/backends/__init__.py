"""Where jobs run: threads, processes, Ray workers; all run the same tiles, for the same bits."""
