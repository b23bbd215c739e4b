"""What a setting would do: its scheduler simulated under costs, before anybody pays for it."""
