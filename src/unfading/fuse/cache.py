import ctypes, hashlib, os, subprocess
def library(source):
    cc=os.environ.get('CC','gcc')
    flags="-O3 -march=native -fno-math-errno -fno-trapping-math -ffp-contract=fast -fopenmp-simd -shared -fPIC -std=gnu11 -Wall -Wno-unused-function".split()
    k=hashlib.sha256((source+cc+' '.join(flags)).encode()).hexdigest()[:16]
    os.makedirs('/root/mine/x/c',exist_ok=True); p=f'/root/mine/x/c/{k}'
    if not os.path.exists(p+'.so'):
        open(p+'.c','w').write(source); subprocess.run([cc,*flags,p+'.c','-o',p+'.so.t%d'%os.getpid(),'-lm'],check=True); os.replace(p+'.so.t%d'%os.getpid(),p+'.so')
    return ctypes.CDLL(p+'.so')
