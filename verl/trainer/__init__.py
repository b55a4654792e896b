"""Trainers: SFT, reward model, PPO, and the loop that they share."""
