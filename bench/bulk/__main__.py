from bench.bulk.program import main

main()
