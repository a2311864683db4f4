/* A team of threads that runs the loop of some rows together, and how it divides and exchanges the work of a step.
   Every member computes its own share of the units. Before it reads what others computed, all of them meet. */
#include <sched.h>
#include <stdint.h>

typedef struct { _Alignas(128) int32_t value; } Flag; /* on a line of the cache, and its neighbour, of its own */
typedef struct {
  char* memory;  /* of the buffers that the members share */
  Flag* arrived; /* of each member, the number of its last meeting */
  Flag go;       /* the number of the last meeting that all have reached */
} Team;
typedef struct { Team* team; int me, members; int32_t meetings; } Member;

/* Wait briefly on the processor, since a step takes microseconds; then let other threads run. */
static inline void wait_for(const Flag* flag, int32_t number) {
  for (int spins = 0; __atomic_load_n(&flag->value, __ATOMIC_ACQUIRE) != number; spins++) {
    if (spins > 200) sched_yield();
#if defined(__x86_64__) || defined(__i386__)
    else __builtin_ia32_pause();
#endif
  }
}

/* Return when all members have called it. The first member collects the others and lets them go on. */
static inline void meet(Member* member) {
  if (member->members == 1) return;
  const int32_t number = ++member->meetings;
  Team* team = member->team;
  if (member->me) {
    __atomic_store_n(&team->arrived[member->me].value, number, __ATOMIC_RELEASE);
    wait_for(&team->go, number);
  } else {
    for (int other = 1; other < member->members; other++) wait_for(&team->arrived[other], number);
    __atomic_store_n(&team->go.value, number, __ATOMIC_RELEASE);
  }
}

/* The first of n entries that belongs to a member; entries are divided in pieces of `piece`. */
static inline int64_t share(int64_t n, int64_t piece, int64_t me, int64_t members) {
  const int64_t at = (n + piece - 1) / piece * me / members * piece;
  return at < n ? at : n;
}
