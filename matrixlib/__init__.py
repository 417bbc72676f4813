"""Training AlphaZero-style networks that do not blow up: a workspace driven by notebooks."""
