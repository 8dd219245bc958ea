/* The page of `hocket ui`: asks for an answer, keeps its state in the address, slides over budgets. */
(() => {
  const byId = (name) => document.getElementById(name);
  const form = byId('question');
  const fields = [...form.elements].filter((each) => each.name);
  let budgets = [];
  let asked = 0;

  const seconds = (s) => (s < 1 ? `${(1000 * s).toPrecision(3)} ms` : `${s.toPrecision(3)} s`);
  const gib = (bytes) => `${(bytes / 2 ** 30).toPrecision(3)} GiB`;

  function query() {
    const chosen = fields.filter((each) => each.value.trim()).map((each) => [each.name, each.value.trim()]);
    return new URLSearchParams(chosen).toString();
  }

  function slide() {
    const plan = budgets[Number(byId('budget').value)];
    byId('at-budget').textContent = `${gib(plan[0])}: ${seconds(plan[1])} per step`;
  }

  function show(answer) {
    byId('answer').innerHTML = answer.html;
    budgets = answer.budgets;
    byId('slider').hidden = budgets.length < 2;
    if (budgets.length > 1) {
      byId('budget').max = budgets.length - 1;
      byId('budget').value = budgets.length - 1;
      slide();
    }
    byId('files').hidden = false;
    byId('plan-file').hidden = !answer.fits;
    byId('plan-file').href = `/plan.json?${answer.files}`;
    byId('report-file').href = `/report.html?${answer.files}`;
    byId('command').textContent = answer.command;
    byId('then').textContent = answer.then;
  }

  async function ask(keep) {
    const text = query(), number = asked += 1;
    if (keep) history.replaceState(null, '', `?${text}`);
    byId('state').textContent = 'planning…';
    const response = await fetch(`/answer?${text}`);
    const answer = await response.json();
    if (number !== asked) return;
    byId('state').textContent = response.ok ? (answer.fits ? 'It trains.' : 'It does not fit.') : `${answer.error}${answer.hint ? ` (${answer.hint})` : ''}`;
    if (response.ok) { show(answer); return; }
    byId('answer').textContent = '';
    byId('slider').hidden = byId('files').hidden = true;
  }

  form.addEventListener('submit', (event) => { event.preventDefault(); ask(true); });
  byId('budget').addEventListener('input', slide);
  byId('budget').addEventListener('change', () => {
    form.elements.memory.value = `${Math.ceil(budgets[Number(byId('budget').value)][0] / 2 ** 20)}MiB`;
  });
  const given = new URLSearchParams(location.search);
  for (const each of fields) if (given.has(each.name)) each.value = given.get(each.name);
  if (given.has('model')) ask(false);
})();
