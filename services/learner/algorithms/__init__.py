"""Mathematics of the learner: pure functions, numpy for rewards and torch for tokens.

rewards ─► advantages (outcomes | token_rewards) ─► losses (ratios, kl, importance) ─► token losses
                                                └─► values: the critic's losses
plugins: advantages and losses of installed packages
"""
