"""Model weights from and to other formats, and fine-tuning adapters."""
