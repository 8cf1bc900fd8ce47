"""pools of words → the sentence templates of invented news items.

A field such as ``{person judge}`` names a pool and, after a space, the role of the drawn value in its item.
"""

from __future__ import annotations

from typing import NamedTuple

Slot = tuple[str, ...]
"""Sentences with the same meaning in different words."""


class Outcome(NamedTuple):
    """One outcome of an event: the sentences that report it in a document, and the summary."""

    told: tuple[Slot, ...]
    summary: str


class Kind(NamedTuple):
    """A kind of event: its outcomes, and irrelevant sentences to open, fill and close the document."""

    outcomes: tuple[Outcome, ...]
    opens: Slot
    fills: tuple[Slot, ...]
    closes: tuple[Slot, ...]


def words(text: str) -> Slot:
    """The words of a text."""
    return tuple(text.split())


def joined(starts: str, ends: str) -> Slot:
    """Every start joined with every end, except those that would double a letter."""
    return tuple(start + end for start in words(starts) for end in words(ends) if start[-1] != end[0])


def numbers(start: int, stop: int, step: int = 1) -> tuple[str, ...]:
    """Whole numbers with a comma after the thousands, excluding ``stop``."""
    return tuple(f"{number:,}" for number in range(start, stop, step))


FIRST = words(
    """
    Ada Adam Aisha Alan Albert Alice Amara Amir Anders Andrea Anita Anna Anton Arjun Arthur Astrid Barbara Basil
    Beatrix Ben Bridget Bruno Callum Carla Carmen Cecil Celia Clara Colin Cora Cyril Daisy Dalia Daniel Daphne
    Darius Dora Dylan Edith Edna Edwin Elena Elias Ella Elsa Emil Emma Enid Eric Erik Esme Esther Ethan Eva Ewan
    Faith Farah Felix Fergus Fiona Flora Frances Frank Freya Gemma George Gilbert Gina Grace Greta Gwen Hana
    Hannah Harold Harriet Harvey Hassan Hazel Hector Heidi Helen Henry Hilda Holly Hugo Ian Ida Imogen Imran Ines
    Ingrid Iris Isaac Isla Ivan Ivy Jack Jacob Jamal Jane Janet Jasmine Jean Joan Joel Jonas Joseph Josie Judith
    Julia Karen Karim Keith Kenji Kiran Kofi Lara Laura Leah Leila Lena Leo Leon Lewis Lily Linda Lois Louis Lucas
    Lucy Luis Luna Lydia Mabel Magda Maria Marion Martha Martin Mason Matilda Maya Megan Mia Milo Mina Miriam Mona
    Morgan Nadia Naomi Nathan Neil Nell Nina Noah Nora Oliver Olga Omar Oscar Otto Owen Paula Pearl Peggy Percy
    Petra Philip Phoebe Priya Rachel Ralph Ravi Rhys Rita Robin Rosa Rowan Ruby Rufus Ruth Sadie Salma Samir
    Sandra Sara Selma Sidney Silas Simon Sofia Stella Stephen Susan Sven Tamsin Tara Tessa Theo Thomas Tilda Toby
    Tomas Ursula Vera Victor Viola Walter Wanda Wesley Wilma Yusuf Zara Zoe
    """
)
LAST = joined(
    "Ard Bel Bran Cald Cor Dal Drum Esk Fal Gar Gren Hal Hart Kel Kirk Lang Lor Mar Mel Nor Pel Quin Ros Sel Tal Thor "
    "Var Wen Yar Zel",
    "ander beck den ding good itt man more rick son ster vey well wood",
)
TOWNS = joined(
    "Amber Ash Birch Black Bram Bright Broad Castle Clay Cold Cop Crow Dray Dun East Elm Fair Fern Glen Green Hazel "
    "Hinter High Iron Lark Lime Long Maple Marsh Mill Moss North Oak Otter Pine Raven Red Salt Sand Silver South Stone "
    "Swan Thorn West Whin Wind Wolf",
    "bourne bridge bury by combe dale field ford gate ham haven mouth port stead ton wick",
)
BRANDS = joined(
    "Acto Alva Bryo Cento Delta Evo Fusi Gala Heli Inno Juno Kora Luma Nexo Opti Prima Quanta Rivo Sola Tera Uni Vela "
    "Xeno Zeta",
    "bond core dyne flex lane mark nova path rise tech",
)
CLUBS = words("Albion Athletic City Harriers Rangers Rovers Town United Wanderers")
FIRMS = words("Brothers Group Holdings Industries Partners Systems Works")
RIVERS = words("Arrel Bure Calden Dorn Elver Fenn Garl Isk Leam Mardle Nyle Orrin Pell Rook Sarn Tarrow Ulver Wend")
WEEKDAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words("January February March April May June July August September October November December")

NAMES: dict[str, tuple[Slot, ...]] = {
    "person": (FIRST, (" ",), LAST),
    "place": (TOWNS,),
    "team": (TOWNS, (" ",), CLUBS),
    "company": (BRANDS, (" ",), FIRMS),
    "university": (TOWNS, (" University",)),
    "river": (("River ",), RIVERS),
    "road": (("A", "B"), numbers(101, 990)),
}
"""Names, by pool: the parts from which one is put together."""

FIGURES: dict[str, tuple[Slot, ...]] = {
    "rout": (("4-0", "5-0", "6-0", "7-0", "4-1", "5-1", "6-1", "7-1", "5-2", "6-2", "7-2", "6-3", "7-3"),),
    "clear": (("2-0", "3-0", "3-1", "4-2", "5-3"),),
    "narrow": (("1-0", "2-1", "3-2", "4-3", "5-4"),),
    "level": (("1-1", "2-2", "3-3", "4-4"),),
    "shootout": (("3-1", "3-2", "4-2", "4-3", "5-3", "5-4", "6-5", "7-6"),),
    "crowd": (numbers(1100, 9900, 100),),
    "count": (numbers(20, 990, 10),),
    "few": (numbers(12, 90),),
    "percent": (numbers(3, 70), (" per cent",)),
    "rise": (numbers(2, 10), (" per cent",)),
    "million": (("£",), numbers(1, 90), (".",), numbers(1, 10), (" million",)),
    "thousand": (("£",), numbers(11, 100), (",",), ("000", "500")),
    "fine": (("£",), numbers(250, 9000, 50)),
    "fare": (("£",), numbers(19, 320)),
    "pence": (numbers(2, 60), ("p",)),
    "millimetres": (numbers(20, 150, 5), ("mm",)),
    "centimetres": (numbers(5, 60), ("cm",)),
    "mph": (numbers(55, 110), ("mph",)),
    "degrees": (numbers(30, 43), ("C",)),
    "votes": (numbers(15, 40), ("-",), numbers(2, 15)),
    "months": (numbers(4, 48), (" months",)),
    "minutes": (numbers(15, 125, 5), (" minutes",)),
    "days": (numbers(2, 15), (" days",)),
    "years": (numbers(2, 35), (" years",)),
    "ages": (numbers(3, 240), (" million years",)),
    "year": (tuple(str(year) for year in range(1951, 2015)),),
    "age": (numbers(19, 88),),
    "elder": (numbers(55, 89),),
}
"""Figures, by pool: the parts from which one is put together."""

PHRASES: dict[str, dict[str, str]] = {
    "weekday": {day: day for day in WEEKDAYS},
    "month": {month: month for month in MONTHS},
    "trade": {
        "which builds cars and vans": "carmaker",
        "which brews beer": "brewer",
        "which sells clothes on the high street": "fashion chain",
        "which writes software for banks": "software firm",
        "which puts up houses": "housebuilder",
        "which flies holidaymakers to the sun": "airline",
        "which bakes bread and cakes": "bakery chain",
        "which makes medicines": "drugs company",
        "which runs a string of supermarkets": "grocer",
        "which digs for copper": "mining firm",
        "which makes toys and games": "toymaker",
        "which lends to small firms": "lender",
    },
    "boost": {
        "orders poured in from abroad": "booming exports",
        "the warm summer brought people into its shops": "the hot weather",
        "fuel and power cost it far less": "cheaper energy",
        "a new range sold out within weeks": "a hit product",
        "it put its prices up twice": "higher prices",
        "two of its rivals went out of business": "weaker competition",
    },
    "drag": {
        "steel and timber cost it far more": "dearer materials",
        "shoppers stayed at home": "weak spending",
        "a fire shut its main warehouse": "a warehouse blaze",
        "hackers brought its computers down for weeks": "a cyber attack",
        "staff walked out in the spring": "strikes",
        "it had to call back a faulty product": "a costly recall",
    },
    "project": {
        "ramps for skateboards beside the canal": "skate park",
        "two dozen wind turbines on the moor": "wind farm",
        "a pool with six lanes": "swimming centre",
        "a ring road round the old town": "bypass",
        "rows of solar panels on farmland": "solar farm",
        "a tower of flats by the station": "tower block",
        "a shed for sorting household rubbish": "recycling plant",
        "a stage and seats for two hundred": "theatre",
        "classrooms for the youngest children": "primary school",
        "a footbridge over the harbour": "pedestrian crossing",
        "tracks for trams through the centre": "tramway",
        "shops under one glass roof": "shopping mall",
    },
    "offence": {
        "taking copper cable from a depot": "theft",
        "setting light to a barn": "arson",
        "selling fake watches on a market stall": "fraud",
        "growing cannabis in a cellar": "drug offences",
        "bringing cigarettes in under a load of onions": "smuggling",
        "driving at twice the limit": "speeding",
        "painting slogans on a war memorial": "vandalism",
        "tipping old tyres into a stream": "pollution",
        "lying under oath": "perjury",
        "printing banknotes in a garage": "forgery",
        "breaking into three houses": "burglary",
        "netting salmon by night": "poaching",
    },
    "job": {
        "who drives a taxi": "taxi driver",
        "who keeps bees": "beekeeper",
        "who fits kitchens": "joiner",
        "who teaches chemistry": "teacher",
        "who works in a bank": "banker",
        "who grows potatoes": "farmer",
        "who repairs boats": "boatbuilder",
        "who cuts hair": "barber",
        "who runs a restaurant": "restaurateur",
        "who looks after gardens": "gardener",
    },
    "habit": {
        "a brisk half hour on foot": "walking",
        "a handful of nuts at breakfast": "eating nuts",
        "two cups of green tea": "drinking tea",
        "a nap after lunch": "napping",
        "lessons on the piano": "playing music",
        "a weekly evening of ballroom steps": "dancing",
        "lengths of the pool before work": "swimming",
        "an hour of weeding and planting": "gardening",
        "a cold shower every morning": "washing in cold water",
        "a vegetable stew in place of meat": "going vegetarian",
    },
    "illness": {
        "clots that starve the brain": "strokes",
        "failing memory in old age": "dementia",
        "sugar building up in the blood": "diabetes",
        "blocked arteries round the heart": "heart disease",
        "brittle bones": "osteoporosis",
        "nights without sleep": "insomnia",
        "low moods": "depression",
        "wheezing lungs": "asthma",
        "pounding headaches": "migraine",
        "stiff and swollen joints": "arthritis",
    },
    "creature": {
        "a hunter that ran on two legs": "dinosaur",
        "a shark as long as a bus": "giant fish",
        "an ape that walked upright": "human ancestor",
        "a bird too heavy to fly": "flightless bird",
        "an elephant with four tusks": "mammoth",
        "a beetle the size of a plate": "huge insect",
        "a reptile with leathery wings": "flying reptile",
        "a toad with teeth": "toothed amphibian",
    },
    "fault": {
        "earth slid on to the track": "a landslip",
        "a crane brought down the power wires": "cable damage",
        "a computer in the control room broke down": "signal failure",
        "a goods wagon came off the rails": "a derailment",
        "cracks were seen in an arch": "an unsafe bridge",
        "the tunnel filled with water": "flooding",
    },
    "spill": {
        "a lorry shed its load of apples": "spilt fruit",
        "a water main burst under the tarmac": "a pipe leak",
        "a tanker tipped over": "an overturned truck",
        "a herd of cows broke through a fence": "a stray herd",
        "an oak came down across both lanes": "a fallen tree",
        "three vans ran into each other": "a pile-up",
    },
    "post": {
        "signing off the accounts": "finance director",
        "leading the company day to day": "chief executive",
        "chairing meetings of the board": "chairman",
        "running the laboratories": "research head",
        "looking after advertising": "marketing boss",
        "hiring and training staff": "personnel chief",
        "keeping the computers going": "technology officer",
        "planning new factories": "strategy director",
    },
    "reason": {
        "doctors advised complete rest": "ill health",
        "the board would not back a merger": "a boardroom row",
        "a rival made a better offer": "a move to a competitor",
        "private trips were charged to the firm": "an expenses scandal",
        "investors asked for fresh faces": "shareholder pressure",
        "the children are still small": "family reasons",
    },
}
"""Plain words, by pool: what a document says → what its summary makes of it."""

MATCH = Kind(
    outcomes=(
        Outcome(
            told=(
                (
                    "It finished {rout} to {team winner}, a day that {team loser} will want to forget.",
                    "{team loser} had no answer and went down {rout} to {team winner}.",
                    "The board read {rout} by the end, and {team winner} deserved it all against a poor {team loser}.",
                    "{team winner} were far better than {team loser} and won {rout}.",
                ),
                (
                    "{person scorer} found the net three times.",
                    "Three of the goals came from {person scorer}.",
                    "The ball went home with {person scorer}, who scored three.",
                ),
            ),
            summary="{team winner} thrashed {team loser} {rout} as {person scorer} hit a hat-trick.",
        ),
        Outcome(
            told=(
                (
                    "{team winner} took the points from {team loser} with a {clear} victory.",
                    "At the whistle {team winner} led {clear} and {team loser} knew they were beaten.",
                    "{team loser} came away with nothing from {team winner}, who were {clear} ahead by then.",
                    "With two goals to spare, {team winner} sent {team loser} home, {clear}.",
                ),
                (
                    "The best player on the field was {person scorer}, who had a part in every goal.",
                    "{person scorer} scored once and made the rest.",
                    "Everything good came from the boots of {person scorer}.",
                ),
            ),
            summary="{person scorer} inspired {team winner} to a comfortable {clear} win over {team loser}.",
        ),
        Outcome(
            told=(
                (
                    "There was one goal in it, {team winner} winning {narrow} while {team loser} hit the post twice.",
                    "{team loser} were unlucky to lose {narrow} to {team winner}.",
                    "It ended {narrow}, and {team winner} were glad to hear the whistle against {team loser}.",
                    "{narrow} was a kind result for {team winner}, since {team loser} had more of the ball.",
                ),
                (
                    "With a minute left {person scorer} scored the goal that decided it.",
                    "The decisive goal fell to {person scorer} in stoppage time.",
                    "{person scorer} settled matters with the last kick.",
                ),
            ),
            summary="{team winner} edged past {team loser} {narrow} thanks to a late {person scorer} strike.",
        ),
        Outcome(
            told=(
                (
                    "{team home} and {team away} could not be parted and it stayed {level}.",
                    "The match between {team home} and {team away} ended {level}.",
                    "Neither side won the game of {team home} against {team away}, which was {level} at the end.",
                    "{level} was the verdict on a fair fight of {team home} with {team away}.",
                ),
                (
                    "The goal that made the sides level was the work of {person scorer}.",
                    "{person scorer} got the second-half goal that brought them level.",
                    "A header by {person scorer} made it all square.",
                ),
            ),
            summary="{person scorer} equalised as {team home} drew {level} against {team away}.",
        ),
        Outcome(
            told=(
                (
                    "Extra time settled nothing, and {team winner} won the shoot-out {shootout} against {team loser}.",
                    "From the spot {team winner} were better than {team loser}, {shootout}.",
                    "{team loser} are out of the cup, losing {shootout} to {team winner} from the spot.",
                    "It came down to the shoot-out, {shootout} to {team winner}, and {team loser} sank to the grass.",
                ),
                (
                    "Goalkeeper {person keeper} kept out two kicks.",
                    "Two kicks were stopped by {person keeper} in goal.",
                    "{person keeper} dived the right way twice.",
                ),
            ),
            summary="Saves by {person keeper} took {team winner} past {team loser} {shootout} on penalties.",
        ),
    ),
    opens=(
        "Rain fell all afternoon at {place ground}.",
        "A crowd of {crowd} came to {place ground} under a cold sky.",
        "{crowd} people had bought tickets for the game at {place ground}.",
    ),
    fills=(
        (
            "{person dropped} missed the game with a sore knee.",
            "There was no room for {person dropped}, who is injured.",
        ),
        (
            "Referee {person referee} showed a red card.",
            "{person referee}, the referee, lost patience with both benches.",
        ),
        ("The same clubs met in {year}, when nobody scored.", "Their last meeting in the cup was in {year}."),
        (
            "Elsewhere {team third} were too good for {team fourth}.",
            "In the other game {team third} met {team fourth}.",
        ),
        ("Season tickets cost {fare}.", "The roof of the stand was mended for {thousand}."),
    ),
    closes=(
        ("{team fifth} are the next opponents.", "Next week brings a trip to {team fifth}."),
        ("Manager {person manager} praised the fans.", "{person manager}, the manager, spoke of a hard week."),
    ),
)

EARNED = (
    "{company}, {trade}, earned {million} before tax.",
    "Before tax, {company}, {trade}, was left with {million}.",
    "The year brought {million} before tax to {company}, {trade}.",
    "After paying its bills {company}, {trade}, had {million} in hand.",
)

RESULTS = Kind(
    outcomes=(
        Outcome(
            told=(
                EARNED,
                (
                    "That is {percent} more than a year ago, because {boost}.",
                    "The figure is {percent} better than last time since {boost}.",
                    "As {boost}, the result was {percent} above the year before.",
                ),
            ),
            summary="Profits at {trade} {company} jumped {percent} to {million}, helped by {boost}.",
        ),
        Outcome(
            told=(
                EARNED,
                (
                    "That is {percent} less than a year ago, because {drag}.",
                    "The figure is {percent} worse than last time since {drag}.",
                    "As {drag}, the result was {percent} below the year before.",
                ),
            ),
            summary="{drag} dragged {trade} {company} profits down {percent} to {million}.",
        ),
        Outcome(
            told=(
                (
                    "{company}, {trade}, is {million} in the red.",
                    "The books of {company}, {trade}, show a hole of {million}.",
                    "{company}, {trade}, spent {million} more than it took.",
                ),
                (
                    "{count} people in {place} will be out of work.",
                    "The factory in {place} will let {count} people go.",
                    "Letters have gone out to {count} staff in {place} whose posts will end.",
                ),
            ),
            summary="{trade} {company} has lost {million} and must axe {count} {place} jobs.",
        ),
        Outcome(
            told=(
                (
                    "{company buyer} has agreed to pay {million} for {company target}, {trade}.",
                    "The owners of {company target}, {trade}, have accepted {million} from {company buyer}.",
                    "For {million}, {company target}, {trade}, will pass into the hands of {company buyer}.",
                ),
                (
                    "The head office in {place} is to shut.",
                    "Nobody will be left at the head office in {place} once the papers are signed.",
                    "The lights will go out at the head office in {place}.",
                ),
            ),
            summary="{company buyer} is buying {trade} {company target} for {million}, closing its {place} base.",
        ),
    ),
    opens=(
        "Markets were calm when the figures came out on {weekday}.",
        "It was a busy {weekday} in the City, where shares in {company rival} fell {pence}.",
        "{weekday} brought news for investors who had seen {company rival} lose {pence} a share.",
    ),
    fills=(
        (
            "Analyst {person analyst} had expected about {million guess}.",
            "{person analyst}, an analyst, had pencilled in {million guess}.",
        ),
        ("{company rival} reports next month.", "Figures from {company rival} are due soon."),
        ("Sales came to {million sales}.", "Turnover was {million sales} over the period."),
        ("A site in {place spare} opened in {year}.", "It has also had a site in {place spare} since {year}."),
        ("{person chief} runs the firm.", "In the chair sits {person chief}, once of {company former}."),
    ),
    closes=(
        (
            "Founder {person founder} still owns {percent stake} of the shares.",
            "{percent stake} of the stock belongs to {person founder}.",
        ),
        ("A dividend of {pence dividend} will be paid.", "Shareholders get {pence dividend} each."),
    ),
)

WEATHER = Kind(
    outcomes=(
        Outcome(
            told=(
                (
                    "As much as {millimetres} of rain will come down on {weekday}.",
                    "Clouds will drop {millimetres} of rain before {weekday} is over.",
                    "By the end of {weekday} the gauges may show {millimetres} of rain.",
                ),
                (
                    "The {river} is coming up, and {person warden} wants everybody out of {place} and {place second}.",
                    "People in {place} and {place second} must leave their homes by the {river}, {person warden} said.",
                    "Coaches sent by {person warden} are taking people out of {place} and {place second}.",
                ),
            ),
            summary="{person warden} is evacuating {place} and {place second} before {weekday} rain of {millimetres}.",
        ),
        Outcome(
            told=(
                (
                    "Gusts out at sea could touch {mph} on {weekday}.",
                    "On {weekday} the wind will blow at {mph}.",
                    "Sailors can expect {weekday} gusts up to {mph}.",
                ),
                (
                    "Boats of {company} will stay in port at {place}, and {place island} must do without them.",
                    "{company} will not sail between {place} and {place island}.",
                    "Between {place} and {place island} the boats of {company} will not run.",
                ),
            ),
            summary="{company} ferries from {place} to {place island} are cancelled over {weekday} gales of {mph}.",
        ),
        Outcome(
            told=(
                (
                    "About {centimetres} of snow will settle on the hills on {weekday}.",
                    "On {weekday} people may wake up to find {centimetres} of snow.",
                    "Snow could lie {centimetres} deep by {weekday} morning.",
                ),
                (
                    "Children in {place} and {place second} were told by {person head} to stay at home.",
                    "There will be no lessons in {place} or {place second}, as {person head} decided.",
                    "{person head} wants no child in {place} or {place second} to leave the house.",
                ),
            ),
            summary="{person head} is closing {place} and {place second} schools over {weekday} snow of {centimetres}.",
        ),
        Outcome(
            told=(
                (
                    "The mercury could reach {degrees} on {weekday}.",
                    "{weekday} will be the hottest day at {degrees}.",
                    "Thermometers are likely to show {degrees} on {weekday}.",
                ),
                (
                    "{company}, which looks after the pipes, forbids watering lawns in {place} and {place second}.",
                    "Lawns in {place} and {place second} must go without water, {company} said.",
                    "Nobody in {place} or {place second} may wash a car, by order of {company}.",
                ),
            ),
            summary="{company} bans hosepipes at {place} and {place second} with {weekday} heading for {degrees}.",
        ),
    ),
    opens=(
        "The quiet spell is over, forecaster {person forecaster} said.",
        "Forecaster {person forecaster} has been watching the charts with concern.",
        "An amber alert was sent out at noon.",
    ),
    fills=(
        ("{place mild} will escape the worst.", "Nothing out of the ordinary is likely over {place mild}."),
        ("The record, {few} years old, is not in danger.", "Nothing like it was seen for {few} years."),
        ("Crews from {place crew} are standing by.", "Extra crews have been sent from {place crew}."),
        (
            "In {year} such weather left {count} homes without power.",
            "Old people recall {year}, when {count} homes went dark.",
        ),
        ("{team} have called off their match.", "Fans of {team} can stay at home."),
    ),
    closes=(
        (
            "{person farmer}, a farmer, has moved the sheep indoors.",
            "Farmer {person farmer} was bringing in the animals.",
        ),
        ("It should be calmer by the end of {month}.", "{month} is usually kinder."),
    ),
)

COUNCIL = Kind(
    outcomes=(
        Outcome(
            told=(
                (
                    "Members in {place} said yes to {project} by {votes}.",
                    "Hands went up {votes} in {place} in favour of {project}.",
                    "{place} is to have {project}, the members decided by {votes}.",
                ),
                (
                    "The builder, {company}, puts the price at {million}.",
                    "{company} will do the work and send in a bill of {million}.",
                    "A contract worth {million} goes to {company}.",
                ),
            ),
            summary="{place} councillors voted {votes} to pay {company} {million} for a {project}.",
        ),
        Outcome(
            told=(
                (
                    "Members in {place} said no to {project} by {votes}.",
                    "Hands went up {votes} in {place} against {project}.",
                    "{place} will not have {project}, the members decided by {votes}.",
                ),
                (
                    "{person neighbour} had collected names from {count} neighbours who did not want it.",
                    "A list of {count} people opposed to it was handed in by {person neighbour}.",
                    "{count} people signed the protest that {person neighbour} began.",
                ),
            ),
            summary="A {project} planned for {place} fell {votes} after {person neighbour} led {count} objectors.",
        ),
        Outcome(
            told=(
                (
                    "Members in {place} will not say yes or no to {project} before {month}.",
                    "{place} must wait until {month} to learn if it gets {project}.",
                    "The file on {project} in {place} goes back in the drawer until {month}.",
                ),
                (
                    "{person treasurer} warned that {million} was more than the town could find.",
                    "The cost, {million}, alarmed {person treasurer}.",
                    "It was {person treasurer} who asked where {million} would come from.",
                ),
            ),
            summary="{person treasurer} has stalled {place} {project} plans to {month} over the {million} expense.",
        ),
    ),
    opens=(
        "The hall was full on {weekday} evening.",
        "Tempers were short at the {weekday} meeting, which lasted {minutes}.",
        "It took {minutes} of debate on {weekday}.",
    ),
    fills=(
        ("Mayor {person mayor} was in the chair.", "The chair was taken by {person mayor}, the mayor."),
        ("The town also set aside {thousand} for street lamps.", "Another {thousand} will be spent on potholes."),
        ("{place rival} faced the same choice in {year}.", "In {year} the question came up in {place rival}."),
        ("{person resident} had called it an eyesore.", "Shopkeeper {person resident} asked about parking."),
        ("The town hall roof will be mended by {company roof}.", "{company roof} has still to mend the hall roof."),
    ),
    closes=(
        ("Council tax rises by {rise} in spring.", "Rents for allotments go up {rise}."),
        ("{place next} holds its own meeting in a week.", "The next session will be held in {place next}."),
    ),
)

CHARGED = (
    "{person accused}, {job}, admitted {offence} in {place}.",
    "{person accused}, {job}, was found {offence} in {place}.",
    "Detectives in {place} had caught {person accused}, {job}, {offence}.",
    "{offence} in {place} brought {person accused}, {job}, before the court.",
)

COURT = Kind(
    outcomes=(
        Outcome(
            told=(
                CHARGED,
                (
                    "The next {months} will be spent behind bars.",
                    "The sentence was {months} in a cell.",
                    "Prison was the only answer, and it will be {months}.",
                ),
            ),
            summary="{place} {job} {person accused} has been jailed for {months} for {offence}.",
        ),
        Outcome(
            told=(
                CHARGED,
                (
                    "It will cost {fine}, to be handed over within a month.",
                    "The penalty was set at {fine}.",
                    "A sum of {fine} is due at once.",
                ),
            ),
            summary="A {job} guilty of {offence} at {place}, {person accused}, has been fined {fine}.",
        ),
        Outcome(
            told=(
                (
                    "{person accused}, {job}, had been accused of {offence} in {place}.",
                    "The case against {person accused}, {job}, was one of {offence} in {place}.",
                    "Police in {place} suspected {person accused}, {job}, of {offence}.",
                ),
                (
                    "After {days} of evidence the twelve said not guilty.",
                    "The twelve heard evidence for {days} and were not convinced.",
                    "There was no proof, the twelve said at the end of {days}.",
                ),
            ),
            summary="Jurors took {days} to clear {place} {job} {person accused} of {offence}.",
        ),
    ),
    opens=(
        "Judge {person judge} spoke for {minutes}.",
        "The public seats were full when Judge {person judge} came in.",
        "The hearing before Judge {person judge} opened {minutes} late.",
    ),
    fills=(
        ("Witness {person witness}, {age}, wept.", "{person witness}, {age}, told the court of a light in the window."),
        ("Prosecutor {person prosecutor} called the facts plain.", "{person prosecutor} spoke for the crown."),
        ("A similar case in {place other} is still open.", "Officers from {place other} had helped."),
        ("The damage was put at {thousand}.", "Lawyers had cost {thousand} by then."),
        ("The papers run to {count} pages.", "There were {few} questions for the experts."),
    ),
    closes=(
        ("Defence lawyer {person lawyer} made no comment.", "{person lawyer}, for the defence, asked for time."),
        ("The court sits again in {month}.", "The papers will be kept until {month}."),
    ),
)

RESEARCH = Kind(
    outcomes=(
        Outcome(
            told=(
                (
                    "Those who had {habit} were {percent} less likely to have {illness}.",
                    "Cases of {illness} were {percent} rarer among those who had {habit}.",
                    "With {habit}, the chance of {illness} was {percent} smaller.",
                ),
                (
                    "The work was done at {university} under {person head}.",
                    "{person head} and colleagues at {university} kept the records.",
                    "Behind it is a group led by {person head} at {university}.",
                ),
            ),
            summary="{person head} of {university} has found that {habit} cuts {illness} by {percent}.",
        ),
        Outcome(
            told=(
                (
                    "Those who had {habit} were just as likely to have {illness}.",
                    "Cases of {illness} were as common among those who had {habit}.",
                    "With {habit} or without, the chance of {illness} was the same.",
                ),
                (
                    "{university} followed {crowd} volunteers for {person head}.",
                    "{crowd} people filled in forms for {person head} at {university}.",
                    "Some {crowd} adults were questioned at {university} by {person head}.",
                ),
            ),
            summary="{habit} does nothing for {illness}, {person head} of {university} learned from {crowd} patients.",
        ),
        Outcome(
            told=(
                (
                    "The bones are those of {creature}, and they go to {place museum} for {thousand}.",
                    "It was {creature}, for which collectors in {place museum} paid {thousand}.",
                    "What is left of {creature} now belongs to {place museum}, which was charged {thousand}.",
                ),
                (
                    "{person finder} came upon the site in a quarry near {place}.",
                    "It lay in a cliff at {place} until {person finder} saw it.",
                    "The spade of {person finder} struck it in a field outside {place}.",
                ),
            ),
            summary="{place museum} museum gave {thousand} for a {creature} fossil {person finder} dug up by {place}.",
        ),
    ),
    opens=(
        "The paper, out on {weekday}, took {months} to write.",
        "After {months} of work the results are in.",
        "Few expected the report that came out on {weekday}.",
    ),
    fills=(
        ("{person sceptic}, who was not involved, urged caution.", "Others such as {person sceptic} want more proof."),
        ("A grant of {million} came from {company}.", "{company} paid {million} towards the costs."),
        (
            "An older study, from {place old}, looked at {few} cases.",
            "Only {few} cases were known, most of them in {place old}.",
        ),
        ("The idea goes back to {year}.", "It was first suggested in {year}."),
        ("A group from {university rival} came second.", "The files are open to {university rival}."),
    ),
    closes=(
        ("{person student}, a student, drew the charts.", "The first draft was by {person student}, a student."),
        ("A talk is planned in {place talk} in {month}.", "{place talk} will host a talk in {month}."),
    ),
)

TRANSPORT = Kind(
    outcomes=(
        Outcome(
            told=(
                (
                    "Nothing runs with {company} from {place start} to {place end}.",
                    "{company} has had to leave the rails empty from {place start} as far as {place end}.",
                    "Passengers of {company} at {place start} who want to go to {place end} are put on coaches.",
                ),
                (
                    "It began when {fault}, and mending it will take {days}.",
                    "Since {fault}, the work will last {days}.",
                    "Engineers need {days} because {fault}.",
                ),
            ),
            summary="{fault} has halted {company} trains between {place start} and {place end} for {days}.",
        ),
        Outcome(
            told=(
                (
                    "Drivers at {company} will leave their buses in the depot at {place} on {weekday}.",
                    "In {place} the buses of {company} will not run on {weekday}.",
                    "On {weekday} nobody will drive for {company} in {place}.",
                ),
                (
                    "{fine} is not enough, the union leader, {person leader}, said.",
                    "Union leader {person leader} had asked for more than {fine}.",
                    "The offer of {fine} did not please {person leader}, who leads the union.",
                ),
            ),
            summary="{person leader} has called a {weekday} bus strike at {company} in {place} over {fine} bonuses.",
        ),
        Outcome(
            told=(
                (
                    "Cars are crawling on the {road} at {place} after {spill}.",
                    "On the {road} in {place}, {spill}.",
                    "The trouble began on the {road} outside {place} when {spill}.",
                ),
                (
                    "Constable {person constable} warned that the journey takes {minutes} longer than usual.",
                    "Those at the wheel lose {minutes}, said Constable {person constable}.",
                    "Allow another {minutes} was the advice of {person constable}, the constable on duty.",
                ),
            ),
            summary="{person constable} says {spill} near {place} on the {road} is delaying traffic by {minutes}.",
        ),
        Outcome(
            told=(
                (
                    "{company} will fly from {place} from {month} on.",
                    "From {month} the planes of {company} will take off from {place}.",
                    "{place} will see planes of {company} from {month}.",
                ),
                (
                    "Seats start at {fare} for the trip to {place far}.",
                    "A seat to {place far} can be had for {fare}.",
                    "For {fare} one can get to {place far}.",
                ),
            ),
            summary="{company} is launching {month} flights out of {place} to {place far}, with fares of {fare}.",
        ),
    ),
    opens=(
        "Travellers were asked to check before leaving home.",
        "Boards at {place board} were red in the morning.",
        "The phones at the travel desk in {place board} rang for {minutes desk}.",
    ),
    fills=(
        (
            "{person traveller}, {age}, was late for a wedding.",
            "Student {person traveller}, {age}, said it was worth a smile.",
        ),
        ("{crowd} people pass through each day.", "About {crowd} tickets are sold daily."),
        ("The {road other} is clear in both directions.", "There are roadworks on the {road other}."),
        ("Services to {place normal} are normal.", "{place normal} is not affected."),
        ("{company rival} makes no changes.", "Tickets of {company rival} are valid as before."),
    ),
    closes=(
        (
            "Spokesperson {person speaker} was sorry for any trouble.",
            "{person speaker}, who speaks for the operator, promised news soon.",
        ),
        (
            "Repairs in {place spare} cost {million} in {year}.",
            "In {year} {million} was spent on the station at {place spare}.",
        ),
    ),
)

APPOINTMENT = Kind(
    outcomes=(
        Outcome(
            told=(
                (
                    "From {month} the task of {post} at {company} falls to {person new}.",
                    "{person new} will be {post} at {company} from {month}.",
                    "{company} has chosen {person new} for the task of {post}.",
                ),
                (
                    "{person old} goes after {years}.",
                    "{person old} had been there for {years}.",
                    "The desk was that of {person old} for {years}.",
                ),
            ),
            summary="{company} has named {person new} its {post} in place of {person old}, who served {years}.",
        ),
        Outcome(
            told=(
                (
                    "{person old} will stop {post} at {company} because {reason}.",
                    "Because {reason}, {person old} gives up {post} at {company}.",
                    "{person old} no longer wants to go on {post} at {company}, since {reason}.",
                ),
                (
                    "A cheque for {thousand} sweetens the farewell.",
                    "There will be {thousand} by way of thanks.",
                    "The contract provides for {thousand} at the end.",
                ),
            ),
            summary="{company} {post} {person old} has resigned over {reason} and will collect {thousand}.",
        ),
        Outcome(
            told=(
                (
                    "At {elder}, {person old} will stop {post} at {company} and see more of the garden.",
                    "{person old} turns {elder} and has had enough of {post} at {company}.",
                    "{company} thanked {person old}, now {elder}, for many years of {post}.",
                ),
                (
                    "For now {person deputy} will look after things.",
                    "Until the board decides, it falls to {person deputy} to hold the fort.",
                    "{person deputy} takes the keys for the time being.",
                ),
            ),
            summary="{person old} is retiring as {company} {post} aged {elder}, {person deputy} taking charge.",
        ),
    ),
    opens=(
        "The announcement came after a long {weekday} meeting in {place office}.",
        "Staff in {place office} heard the news on {weekday}.",
        "There had been rumours in {place office} for {few} days.",
    ),
    fills=(
        ("{person tipped} had been tipped by the papers.", "The papers had written about {person tipped}."),
        ("{company rival} made changes of its own in {year}.", "In {year} it parted from {company rival}."),
        ("Shares rose {pence}.", "The market took {pence} off the shares."),
        ("The firm has {crowd} staff.", "It sells to {few customers} countries."),
        ("A degree from {university} hangs in the hall.", "Many managers were taught at {university}."),
    ),
    closes=(
        (
            "{person investor}, who owns {percent}, was pleased.",
            "With {percent} of the stock, {person investor} has a say.",
        ),
        ("Plans for a plant in {place plant} are unchanged.", "The new works in {place plant} will open as planned."),
    ),
)

KINDS: dict[str, Kind] = {
    "match": MATCH,
    "results": RESULTS,
    "weather": WEATHER,
    "council": COUNCIL,
    "court": COURT,
    "research": RESEARCH,
    "transport": TRANSPORT,
    "appointment": APPOINTMENT,
}
