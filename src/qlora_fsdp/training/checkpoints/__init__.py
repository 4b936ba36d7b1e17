"""What a run resumes from: when it is saved, how it is written, and how it is read."""
