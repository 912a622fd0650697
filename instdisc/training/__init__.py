"""What training loops share: processes, precision, seeds, schedules, timing."""
