"""What runs this step: which request sits where, and what the attention layers of each group read."""
