"""The log of a job that ran elsewhere: its formats, its readers, and the calibration from it."""
