"""Which method on which data: one harness for all contenders."""
