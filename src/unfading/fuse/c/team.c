/* Work divided among threads: loops over tiles of rows, gradients of matrices, and the packing of matrices.
   Compiled after team.h. The threads are those of torch, if its OpenMP can be called: their number is limited already, and
   while they wait for work on the processor, threads of our own would have to share it with them. Else they are created here. */
#include <pthread.h>
#include <stdlib.h>

typedef struct Job Job;
typedef void (*Task)(Job* job, int me, int members);
/* The loop of a step: over tiles of rows, each run by one thread; or, with a member, by a team of threads. */
typedef int (*Rows)(void**, int64_t, int64_t, int64_t, int64_t, int64_t, int, const int64_t*, const int64_t*);
typedef int (*Units)(void**, int64_t, int64_t, int64_t, int64_t, int64_t, int, const int64_t*, const int64_t*, Member*);
typedef void (*Outer)(const char*, int64_t, const char*, int64_t, int64_t, int64_t, int64_t, char*, int64_t, double);
typedef void (*Pack)(const int64_t*, int64_t, const void**, void*, int64_t, int64_t);
typedef int (*Share)(const void*, int, int);

typedef struct {
  void* entry; void** tensors;
  int64_t T, B, tile, tiles, together; /* threads of a team */
  int reverse;
  const int64_t *order, *lengths;
} Loop;
typedef struct { Outer outer; const char *a, *b; char* c; int64_t lda, ldb, ldc, lines, n, k, item; double scale; } Product;
typedef struct { Pack pack; const int64_t* blocks; int64_t count; const void** matrices; void* to; } Packing;
typedef struct { Share share; const void* call; } Sharing;
struct Job {
  Task task;
  int threads, members; /* wanted, and running */
  int next, tile, failed; /* the next member's number; the next tile */
  Flag ready;
  Team* teams;
  union { Loop loop; Product product; Packing packing; Sharing sharing; };
};

static void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
static int (*running)(void);
/* GOMP_parallel and omp_get_num_threads of torch's OpenMP, or null. */
void use(void* start, void* count) {
  *(void**)&parallel = start;
  *(void**)&running = count;
}

static void in_parallel(void* argument) {
  Job* job = argument;
  job->task(job, __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED), running());
}
static void* in_thread(void* argument) {
  Job* job = argument;
  wait_for(&job->ready, 1);
  job->task(job, __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED), job->members);
  return 0;
}
static void run(Job* job) {
  if (parallel) {
    parallel(in_parallel, job, job->threads, 0);
    return;
  }
  pthread_t* others = malloc(sizeof(pthread_t) * job->threads);
  int started = 0;
  while (others && started < job->threads - 1 && !pthread_create(others + started, 0, in_thread, job)) started++;
  job->members = started + 1;
  __atomic_store_n(&job->ready.value, 1, __ATOMIC_RELEASE);
  in_thread(job);
  for (int i = 0; i < started; i++) pthread_join(others[i], 0);
  free(others);
}

static void run_loop(Job* job, int me, int members) {
  const Loop* loop = &job->loop;
  int failed = 0;
  if (loop->together == 1) {
    Rows rows = (Rows)loop->entry;
    for (int64_t i; !failed && (i = __atomic_fetch_add(&job->tile, 1, __ATOMIC_RELAXED)) < loop->tiles;)
      failed = rows(loop->tensors, loop->T, loop->B, loop->tile, i, i + 1, loop->reverse, loop->order, loop->lengths);
  } else {
    const int together = loop->together < members ? loop->together : members, teams = members / together, team = me / together;
    Units units = (Units)loop->entry;
    Member member = {job->teams + team, me % together, together, 0};
    for (int64_t i = team; team < teams && !failed && i < loop->tiles; i += teams)
      failed = units(loop->tensors, loop->T, loop->B, loop->tile, i, i + 1, loop->reverse, loop->order, loop->lengths, &member);
  }
  if (failed) __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
}
/* All tiles of a loop; 1 if there was no memory. */
int loops(int threads, void* entry, void** tensors, int64_t T, int64_t B, int64_t tile, int64_t together, int reverse,
    const int64_t* order, const int64_t* lengths) {
  Job job = {.task = run_loop, .threads = threads};
  job.loop = (Loop){entry, tensors, T, B, tile, (B + tile - 1) / tile, together, reverse, order, lengths};
  Flag* flags = 0;
  if (together > 1) {
    job.teams = aligned_alloc(128, sizeof(Team) * (threads / together));
    flags = aligned_alloc(128, sizeof(Flag) * threads);
    for (int i = 0; flags && i < threads; i++) flags[i].value = 0;
    for (int i = 0; job.teams && i < threads / together; i++) job.teams[i] = (Team){.arrived = flags + i * together};
  }
  if (together > 1 && (!job.teams || !flags)) job.failed = 1;
  else run(&job);
  free(job.teams);
  free(flags);
  return job.failed;
}

static void run_product(Job* job, int me, int members) {
  const Product* p = &job->product;
  const int64_t from = share(p->n, 6, me, members), to = share(p->n, 6, me + 1, members);
  if (from < to)
    p->outer(p->a + from * p->item, p->lda, p->b, p->ldb, p->lines, to - from, p->k, p->c + from * p->ldc * p->item, p->ldc, p->scale);
}
/* `outer` of products.c, in numbers of `item` bytes. */
void outers(int threads, void* outer, int64_t item, const char* a, int64_t lda, const char* b, int64_t ldb, int64_t lines, int64_t n,
    int64_t k, char* c, int64_t ldc, double scale) {
  Job job = {.task = run_product, .threads = threads};
  job.product = (Product){(Outer)outer, a, b, c, lda, ldb, ldc, lines, n, k, item, scale};
  run(&job);
}

static void run_packing(Job* job, int me, int members) {
  const Packing* p = &job->packing;
  p->pack(p->blocks, p->count, p->matrices, p->to, me, members);
}
/* `pack_all` of products.c. */
void packs(int threads, void* pack, const int64_t* blocks, int64_t count, const void** matrices, void* to) {
  Job job = {.task = run_packing, .threads = threads};
  job.packing = (Packing){(Pack)pack, blocks, count, matrices, to};
  run(&job);
}

static void run_share(Job* job, int me, int members) {
  if (job->sharing.share(job->sharing.call, me, members)) __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
}
/* A function that computes the part of a member; 1 if there was no memory. */
int shares(int threads, void* share, const void* call) {
  Job job = {.task = run_share, .threads = threads};
  job.sharing = (Sharing){(Share)share, call};
  run(&job);
  return job.failed;
}
