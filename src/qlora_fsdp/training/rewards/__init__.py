"""What rewards answers that the model writes: functions, in processes of their own."""
