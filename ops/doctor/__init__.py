"""`perdure doctor`: looks at everything that a home keeps and says in words what is wrong, and mends what can be.

Owns the judgement; the formats belong to the services, whose own readers are used. Examining changes no file and
works beside a running stack; mending needs the home for itself.

Read in this order: `report` (what is found), `patient` (who is examined), then one file a subject: `places_check`,
`machine`, `clock`, `arena` over `arena_view`, `dead_arenas`, `disk` over `segments` and `index`, `numbers`,
`journal` over `journal_view`, `ledger`, `running`; `mend_arena` and `mend_disk` mend; `exam` calls them all.
"""
