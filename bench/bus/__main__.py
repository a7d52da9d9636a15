from bench.bus.program import main

main()
