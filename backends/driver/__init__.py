"""The driver of a real run: it carries out the scheduler's commands on engines and a trainer."""
