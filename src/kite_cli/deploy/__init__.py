"""The folder of a deployment: who takes part, what each may do on the bus, and the files that say so. Pure but for
`folder`.
"""
