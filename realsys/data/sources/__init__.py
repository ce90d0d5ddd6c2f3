"""Sources of rows: JSON, parquet and Arrow files, folders of data sets, generated tasks."""
