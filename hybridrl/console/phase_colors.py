"""Phases of a step, by which its time is told: generating, scoring, training, syncing weights."""

STEP_PHASES = ("generate", "score", "train", "sync", "other")

# One colour per phase, in the console and in the curves.
PHASE_COLORS = {
    "generate": "#4c8ed9",
    "score": "#e8b13a",
    "train": "#e0653f",
    "sync": "#45ada0",
    "other": "#8c8c96",
}
