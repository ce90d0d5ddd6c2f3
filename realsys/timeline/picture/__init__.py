"""The timeline as a file for ui.perfetto.dev: rows, arrows, trace events."""
