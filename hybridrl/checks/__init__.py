"""What is refused before a job starts: settings that contradict each other, or that models, data,
devices or trainers cannot follow."""
