"""Every transfer task for several networks."""
