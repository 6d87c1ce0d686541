"""Model prediction alignment: a target's answers, a drafter that learns them, and what it gains (BiLD §3.5.1)."""
