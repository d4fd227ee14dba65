"""The live page: latency percentiles, cache tiers, admissions and sheds, from /v1/status once a second."""

PAGE = b"""<!doctype html><html lang="en"><meta charset="utf-8"><title>nestrec serving</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body{font:15px system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;
color:#1a1a2e;background:#fff}
h1{font-size:1.3rem}h2{font-size:1rem;margin-top:1.6rem}.row{display:flex;flex-wrap:wrap;gap:1rem}
.card{border:1px solid #d5d8e0;border-radius:8px;padding:.7rem 1rem;min-width:8rem}
.card b{display:block;font-size:1.4rem}
meter{width:12rem}table{border-collapse:collapse}td{padding:.15rem 1rem .15rem 0}
@media(prefers-color-scheme:dark){body{background:#14161c;color:#e6e8ee}.card{border-color:#3a3f4d}}</style>
<h1>nestrec serving</h1><p id="state" role="status">waiting for the first figures</p>
<div class="row" id="latency"></div><div id="models"></div>
<script>
const card=(name,value)=>{const d=document.createElement('div');d.className='card';const b=document.createElement('b');
b.textContent=value;d.append(b,name);return d};
const meter=(name,used,of,unit)=>{const p=document.createElement('p');const m=document.createElement('meter');
m.max=of||1;m.value=used;m.title=name;
p.append(m,` ${name}: ${used.toLocaleString()} of ${of.toLocaleString()} ${unit}`);return p};
async function show(){try{const s=await(await fetch('/v1/status')).json();
const l=s.latency;document.getElementById('latency').replaceChildren(...['p50_ms','p90_ms','p99_ms'].map(
n=>card(n.replace('_ms',' ms'),l[n]===undefined?'-':l[n].toFixed(1))),card('answers (recent)',l.answers),
card('diverted',s.router.diverted),card('leaked',s.router.leaked));
document.getElementById('models').replaceChildren(...Object.entries(s.models).map(([role,m])=>{
const d=document.createElement('section');const h=document.createElement('h2');h.textContent=`${role} ${m.version}`;
const t=document.createElement('table');for(const[n,v]of Object.entries(m.counts).sort()){const r=t.insertRow();
r.insertCell().textContent=n.replaceAll('_',' ');r.insertCell().textContent=v.toLocaleString()}
d.append(h,meter('device cache',m.device_pages_used,m.device_pages,'pages'),
meter('DRAM tier',m.dram_bytes_used,m.dram_bytes,'bytes'),
`work waiting: ${(m.queued_s*1e3).toFixed(0)} ms; reload beats computing from `+
`${m.break_even_tokens??'no'} tokens on`,t);return d}));
document.getElementById('state').textContent='live, '+new Date().toLocaleTimeString()}
catch(e){document.getElementById('state').textContent='no answer from the server'}setTimeout(show,1000)}show()
</script></html>"""
