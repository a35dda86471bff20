"""What every package may use: strict models, tables in files, running means."""
