"""Robot policies: learning from episodes, acting, and the closed loop in an environment."""
