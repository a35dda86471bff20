"""The run file: one strict model per table, and its reader."""
