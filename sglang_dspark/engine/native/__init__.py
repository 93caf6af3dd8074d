"""Native DSpark drafts: SGLang's own drafter and verify, with this package's decisions in place of its planner's."""
