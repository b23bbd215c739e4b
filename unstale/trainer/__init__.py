"""The trainer, its optimizer and its metrics."""
