/* LD_PRELOAD: the main thread of a process as on a processor that is some times slower.
 *
 * HYBRIDCOMP_SLOW_PROCESSOR names a file of one double: how many times slower, 1 for not at all; it
 * may change at any moment. Whenever the thread has had a core for QUANTUM_NS, a signal makes it
 * sleep until `times` as long has gone by, and so does what hands bytes on, waits or reads a clock: a
 * message leaves when a slower processor would send it. Other than under a quota nothing is saved up by waiting,
 * threads that move bytes go on meanwhile, and what the thread waited for a core while others had
 * them all counts as slept. All that cannot be set up ends the process with a message and status 97.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/perf_event.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* With a fourth of it a block of a transformer took a quarter more CPU time: caches are cold behind
   a sleep. */
#define QUANTUM_NS 1000000
/* What it waited longer than that is not made up for: a rank would save it up, as under a quota. */
#define MOST_CREDIT_NS 2e7
/* A shorter sleep before waiting would be as long as what it takes to begin one. */
#define LEAST_SLEEP_NS 1e5
#define SIGNAL (SIGRTMAX - 3)

static const volatile double *times;
static int counter = -1, schedule = -1;
static pthread_t thread;               /* the main one */
static volatile sig_atomic_t settling; /* a signal that comes meanwhile is late by that alone */
static double owed; /* nanoseconds that the thread has still to sleep */
static double used, delayed;

static void fail(const char *what) {
  fprintf(stderr, "slow_processor: %s: %s\n", what, strerror(errno));
  _exit(97);
}

static int read_clock(clockid_t clock, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, "clock_gettime");
  return real(clock, now);
}

static double seconds_of(clockid_t clock) {
  struct timespec now;
  read_clock(clock, &now);
  return now.tv_sec * 1e9 + now.tv_nsec;
}

/* Nanoseconds that the thread has waited for a core: the second number of schedstat. */
static double waited(void) {
  char text[96];
  ssize_t size = pread(schedule, text, sizeof text - 1, 0);
  if (size <= 0) return delayed;
  text[size] = 0;
  const char *at = strchr(text, ' ');
  double sum = 0;
  while (at && *++at >= '0' && *at <= '9') sum = sum * 10 + (*at - '0');
  return sum;
}

static void restart(void) {
  used = seconds_of(CLOCK_THREAD_CPUTIME_ID);
  delayed = waited();
}

static void sleep_out(void) {
  double began = seconds_of(CLOCK_MONOTONIC), end = began + owed;
  struct timespec until = {(time_t)(end / 1e9), 0};
  until.tv_nsec = (long)(end - until.tv_sec * 1e9);
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR) continue;
  owed -= seconds_of(CLOCK_MONOTONIC) - began;
}

/* What the thread owes by now is added up; returns the nanoseconds that it should sleep. */
static double account(void) {
  if (*times > 1) {
    owed += (*times - 1) * (seconds_of(CLOCK_THREAD_CPUTIME_ID) - used) - (waited() - delayed);
    if (owed < -MOST_CREDIT_NS) owed = -MOST_CREDIT_NS;
  } else {
    owed = 0;
  }
  restart();
  return owed;
}

static void settle(void) {
  int kept = errno;
  settling = 1;
  if (account() > 0) sleep_out();
  restart();
  settling = 0;
  errno = kept;
}

static void has_run(int signal, siginfo_t *info, void *context) {
  (void)signal, (void)info, (void)context;
  if (!settling) settle();
}

static int is_slow_main(void) {
  return times && *times > 1 && pthread_equal(pthread_self(), thread);
}

/* Whether the thread should sleep before it goes on. */
static int owes_a_sleep(void) {
  if (!is_slow_main()) return 0;
  settling = 1;
  double due = account();
  settling = 0;
  return due >= LEAST_SLEEP_NS;
}

/* Before the thread waits it sleeps, without the lock, and returns as if it had been woken: all that
 * wait for a condition look again. Returns whether it slept. */
static int slept_before_waiting(pthread_mutex_t *mutex) {
  if (!owes_a_sleep()) return 0;
  pthread_mutex_unlock(mutex);
  settle();
  pthread_mutex_lock(mutex);
  return 1;
}

/* Times that a thread takes of its own work begin and end where it owes nothing: behind a wait a
 * stretch shorter than QUANTUM_NS would else seem as fast as on the core. */
int clock_gettime(clockid_t clock, struct timespec *now) {
  if (!settling && owes_a_sleep()) settle();
  return read_clock(clock, now);
}

/* What gloo hands bytes on by. */
ssize_t writev(int file, const struct iovec *parts, int count) {
  static ssize_t (*real)(int, const struct iovec *, int);
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, "writev");
  if (is_slow_main()) settle();
  return real(file, parts, count);
}

int pthread_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex) {
  static int (*real)(pthread_cond_t *, pthread_mutex_t *);
  if (!real) *(void **)&real = dlvsym(RTLD_NEXT, "pthread_cond_wait", "GLIBC_2.3.2");
  return slept_before_waiting(mutex) ? 0 : real(cond, mutex);
}

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *until) {
  static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
  if (!real) *(void **)&real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  return slept_before_waiting(mutex) ? 0 : real(cond, mutex, until);
}

static void start(void) {
  struct perf_event_attr attr = {0};
  attr.type = PERF_TYPE_SOFTWARE;
  attr.size = sizeof attr;
  attr.config = PERF_COUNT_SW_TASK_CLOCK;
  attr.sample_period = QUANTUM_NS;
  attr.disabled = 1;
  attr.wakeup_events = 1;
  if (schedule >= 0) close(schedule);
  if (counter >= 0) close(counter);
  schedule = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
  if (schedule < 0) fail("/proc/thread-self/schedstat");
  counter = syscall(SYS_perf_event_open, &attr, 0, -1, -1, PERF_FLAG_FD_CLOEXEC);
  if (counter < 0) fail("perf_event_open");
  struct f_owner_ex owner = {F_OWNER_TID, (pid_t)syscall(SYS_gettid)};
  if (fcntl(counter, F_SETFL, O_ASYNC) || fcntl(counter, F_SETSIG, SIGNAL) ||
      fcntl(counter, F_SETOWN_EX, &owner))
    fail("fcntl");
  prctl(PR_SET_TIMERSLACK, 1000);
  thread = pthread_self();
  restart();
  if (ioctl(counter, PERF_EVENT_IOC_ENABLE, 0)) fail("PERF_EVENT_IOC_ENABLE");
}

__attribute__((constructor)) static void load(void) {
  const char *path = getenv("HYBRIDCOMP_SLOW_PROCESSOR");
  if (!path) return;
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) fail(path);
  void *page = mmap(NULL, sizeof(double), PROT_READ, MAP_SHARED, file, 0);
  if (page == MAP_FAILED) fail(path);
  close(file);
  times = page;
  struct sigaction action = {0};
  action.sa_sigaction = has_run;
  action.sa_flags = SA_RESTART | SA_SIGINFO;
  if (sigaction(SIGNAL, &action, NULL)) fail("sigaction");
  if (pthread_atfork(NULL, NULL, start)) fail("pthread_atfork");
  start();
}
