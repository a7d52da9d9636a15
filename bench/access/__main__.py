from bench.access.program import main

main()
