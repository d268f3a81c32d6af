"""Reading a run directory: files, metric columns, summary, time accounting."""
