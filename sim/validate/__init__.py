"""What the simulator computes, beside what others measured."""
